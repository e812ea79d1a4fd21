"""Plans for serving: which GPUs, how many, which settings, over a day; and the commands that launch them."""
