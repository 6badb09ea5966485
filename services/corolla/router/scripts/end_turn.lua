-- ARGV: session id, tenant, turn id, ttl in ms, then record and chain unless the turn is discarded.
local key = session_key(ARGV[1])
if not owned(ARGV[1], ARGV[2]) then return {'missing'} end
if redis.call('GET', turn_key(ARGV[1])) ~= ARGV[3] then
  -- The same call again is no error: the first answer may be lost.
  if redis.call('HGET', key, 'turn') == ARGV[3] then return {'ok'} end
  return {'lost'}
end
redis.call('DEL', turn_key(ARGV[1]))
redis.call('HSET', key, 'turn', ARGV[3])
if ARGV[5] then redis.call('HSET', key, 'record', ARGV[5], 'chain', ARGV[6]) end
keep(ARGV[1], tonumber(ARGV[4]))
return {'ok'}
