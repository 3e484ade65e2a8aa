"""Simulated machines: kernels run on models of the hardware that find what the hardware would do wrong."""
