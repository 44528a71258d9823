"""The ranks of a worker on GPUs of this host, with a process for each. They start as other ranks do, sum by NCCL and
launch the same steps."""
