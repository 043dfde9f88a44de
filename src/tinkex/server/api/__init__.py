"""
The HTTP API, with one module for each group of routes.

It reads request bodies, finds the owner of a request, and builds responses. The scheduler and the
store decide everything else.
"""
