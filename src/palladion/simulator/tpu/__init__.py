"""The simulated TPU: `interpret=pltpu.InterpretParams(…)`."""
