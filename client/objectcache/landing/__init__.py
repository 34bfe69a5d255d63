"""Where the bytes of a delivery or put lie: who may write there, and when it is free again."""
