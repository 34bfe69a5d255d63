"""Where the bytes of a delivery or put lie: who may write there, and when it is free again.

`regions.Region` is the contract of such memory, which is registered with a session and taken away
from it again. `regions.Landing` holds one for a delivery or put until nobody else touches it.
"""
