"""The kinds of notifications between web processes and workers. Each has a list of texts."""

# To all web processes.
DONE = "done"  # requests whose results are stored
EVENTS = "events"  # samplers with new events
CHANGED_SESSIONS = "changed sessions"  # sessions that are finished or have timed out

# To one web process.
TOKENS = "tokens"  # "REQUEST-ID TOKENS-AS-BASE64": tokens of a running sample

# To one worker.
ACCEPTED = "accepted"  # requests
STREAMED = "streamed"  # "REQUEST-ID CHANNEL": a sample whose tokens go to this channel
CANCELLED = "cancelled"  # requests
REFUSED = "refused"  # models with a refused step
