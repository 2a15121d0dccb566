"""The documents by which an agent finds out what the service is and how to use it (spec 4.2).

    links.py       where each document lives
    quickstart.py  /api/v1/agent/quickstart
    agent.py       agent.json and the plugin manifest
    wellknown.py   security.txt, api-catalog, robots.txt, sitemap.xml, the home page
    llms.py        llms.txt; llms_full.py the long one, with advice.py and signatures.py
    recording.py   whole swaps on the sandbox, recorded; exchanges.py shows them in llms-full.txt
    catalogue.py   all of them together, ready to be served

Pure functions of ``Site``: nothing comes from a request. What does not live here: serving
(http/discovery.py), OpenAPI, OpenRPC and the keys (given as callables).
"""
