"""Traces of requests: the only room that spells OpenTelemetry.

`spans` begins and ends spans, `carriers` reads and writes W3C trace contexts, `export` sends spans to a collector.
Where nobody collects, or a request is not sampled, no span is made, and nothing is written anywhere.
"""
