"""Between text and token ids: `encode` checks and encodes prompts, `detokenizer` turns a stream of ids into the text that may be shown."""
