"""Plans for serving: GPUs, degrees and settings for a load and a service level."""
