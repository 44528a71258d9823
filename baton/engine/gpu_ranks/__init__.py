"""The ranks of a worker on GPUs of this host, a process for each: started as others are, they sum by NCCL and launch
the same steps."""
