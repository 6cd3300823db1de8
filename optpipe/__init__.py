"""OptPipe: plans and runs pipeline-parallel training."""

__version__ = "0.1.0"
