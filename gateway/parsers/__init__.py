"""Find reasoning and tool calls in what a model writes, in the form of its family; the same however the text is cut."""
