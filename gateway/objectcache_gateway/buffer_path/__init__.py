"""The paper's path `buffer`: a payload that passes through the gateway's memory."""
