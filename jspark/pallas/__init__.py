"""Device kernels, one folder an op: a reference that is also the XLA fallback, then a file a backend."""
