"""The hands of autotune: short measuring jobs on real ranks. torch lives here and nowhere else.

Importing this package, `probes.launch` and the `merge` functions loads no torch: only rank processes do.
"""
