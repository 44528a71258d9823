"""Calls of the native kernels, recorded and repeated on another processor."""
