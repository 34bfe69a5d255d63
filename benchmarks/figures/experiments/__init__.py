"""The paper's figures and tables, an experiment each."""
