-- Returns the chain to which a session is pinned, if any. ARGV: session id.
return redis.call('HGET', session_key(ARGV[1]), 'chain')
