"""Parts of stepserve that are not stepserve's: two policies and an engine without torch."""
