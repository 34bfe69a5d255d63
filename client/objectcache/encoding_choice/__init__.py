"""Whether deliveries are asked for encoded: pure, by what past ones measured."""
