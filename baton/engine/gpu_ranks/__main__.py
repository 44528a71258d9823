"""One rank of a model on a GPU, started by the first one (ranks/process.py)."""

from baton.engine.gpu_ranks.program import serve

if __name__ == "__main__":
    serve()
