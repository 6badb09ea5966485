-- Counts the sessions. Some expired ones are removed first, so that they do not pile up.
forget_expired(EVERYONE)
return redis.call('ZCOUNT', SESSIONS, string.format('%.0f', now_ms()), '+inf')
