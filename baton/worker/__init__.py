"""What a GPU worker is: the process that both roles start."""
