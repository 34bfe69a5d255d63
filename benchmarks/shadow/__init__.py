"""ShadowServe's questions: encoded prefixes over slow links, and who decodes them."""
