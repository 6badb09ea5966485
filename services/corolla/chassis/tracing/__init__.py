"""Traces of requests. Only this room uses OpenTelemetry.

`spans` begins and ends spans, `carriers` reads and writes W3C trace contexts, `export` sends spans to a collector.
Without a collector, or for a request that is not sampled, no span is made and nothing is written.
"""
