"""What happens over time, under load: collectives on a network, pipelines, training steps, serving."""
