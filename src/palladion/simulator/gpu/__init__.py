"""Simulated Hopper and Blackwell GPUs: `interpret=plgpu.InterpretGPUParams(…)`."""
