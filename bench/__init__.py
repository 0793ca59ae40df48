"""The benchmarks: how fast a guarded run is, and how small its footprint. `python -m bench --help`.

Every ratio has its peer measured in the same session, in interleaved pairs, on the same machine and the same S3 server.
"""
