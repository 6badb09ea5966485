-- Expired sessions leave the set before it is counted, so the count cannot drift.
redis.call('ZREMRANGEBYSCORE', SESSIONS, '-inf', string.format('%.0f', now_ms()))
return redis.call('ZCARD', SESSIONS)
