"""Several real vLLM schedulers behind one capped link: what need-aware sharing is worth, with
nothing told to the server but by the connector.
"""
