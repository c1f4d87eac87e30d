"""The caching allocator as pure code: rules, simulator, replay, what-if."""
