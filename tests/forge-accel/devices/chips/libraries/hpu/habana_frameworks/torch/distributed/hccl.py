"""Stand-in for the module that registers the backend hccl."""
