"""Finding the rate that a delivery needs, and the payload from which layerwise delivery wins.

`geometry` is what is delivered, `knee` and `threshold` judge what was measured, `measure` measures
it on a running server, `calibrate` puts them together, `report` and `curve_svg` show it.
"""
