"""Bridges to other libraries, one module each; import the one you need, for instance `lowtide.ext.nnx`."""
