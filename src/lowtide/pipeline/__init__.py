"""Pipeline parallelism: schedules as data, the split of a backward pass, and one SPMD program that runs a schedule."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
