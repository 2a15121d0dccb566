"""The documents by which an agent finds out what the service is and how to use it (spec 4.2).

Pure functions of ``Site``: nothing comes from a request.
"""
