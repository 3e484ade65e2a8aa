"""PTX on the CPU: a parser and a SIMT machine, to run compiled GPU code with no GPU."""
