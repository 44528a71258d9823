"""Connect two pools (inproc, shm, tcp, grpc, cuda_ipc, nixl) behind one contract, and choose among these transports."""
