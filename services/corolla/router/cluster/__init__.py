"""What Kubernetes knows of the pods of block servers, and what the router writes there. The router works without it."""
