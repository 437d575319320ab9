"""Bridges to other libraries, one module each, which is imported at its first use: for instance `lowtide.ext.nnx`."""

from . import equinox as equinox
from . import keras as keras
from . import nnx as nnx
