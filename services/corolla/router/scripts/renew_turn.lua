-- Extends the lock of a turn. ARGV: session id, turn id, lock in ms.
if redis.call('EXISTS', session_key(ARGV[1])) == 0 then return {'missing'} end
if redis.call('GET', turn_key(ARGV[1])) ~= ARGV[2] then return {'lost'} end
redis.call('PEXPIRE', turn_key(ARGV[1]), ARGV[3])
keep_at_least(ARGV[1], tonumber(ARGV[3]))
return {'ok'}
