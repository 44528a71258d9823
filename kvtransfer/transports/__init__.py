"""Ways between two pools (inproc, shm, tcp, grpc, cuda_ipc, nixl) behind one contract, and the choice among them."""
