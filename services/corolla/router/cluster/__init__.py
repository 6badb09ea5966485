"""What Kubernetes knows of the block servers' pods, and is told of them. The router works without it."""
