"""One episode: chat rendering in tokens, tool-call parsers, agent loop, environments, rewards, groups."""
