-- Counts the sessions. Expired sessions are removed first, so the count cannot drift.
redis.call('ZREMRANGEBYSCORE', SESSIONS, '-inf', string.format('%.0f', now_ms()))
return redis.call('ZCARD', SESSIONS)
