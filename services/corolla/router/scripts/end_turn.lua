-- Ends a turn: writes its record and chain, unless they are missing, and unlocks the session.
-- ARGV: session id, tenant, turn id, ttl in ms, epoch and store id of the turn, then record and chain.
local key = session_key(ARGV[1])
if owned(ARGV[1], ARGV[2]) then
  local holder = redis.call('GET', turn_key(ARGV[1]))
  if holder ~= ARGV[3] then
    -- The same call may be repeated, because the first answer may be lost.
    if redis.call('HGET', key, 'turn') == ARGV[3] then return {'ok'} end
    -- A lock may run out, for example while Redis is frozen. That does no harm unless another turn has begun, which
    -- raises the epoch.
    if holder or redis.call('HGET', key, 'epoch') ~= ARGV[5] then return {'lost'} end
  end
else
  -- If Redis has lost its data since the turn began, it does not know the session, and the turn writes it anew.
  local is_forgotten = redis.call('EXISTS', key) == 0 and ARGV[6] ~= '' and ARGV[6] ~= store_id()
  if not is_forgotten or not ARGV[7] then return {'missing'} end
  redis.call('HSET', key, 'tenant', ARGV[2], 'epoch', ARGV[5])
end
-- This write comes first and frees memory, so a full Redis lets running turns end.
redis.call('DEL', turn_key(ARGV[1]))
redis.call('HSET', key, 'turn', ARGV[3])
if ARGV[7] then redis.call('HSET', key, 'record', ARGV[7], 'chain', ARGV[8], 'written', ARGV[3]) end
keep(ARGV[1], tonumber(ARGV[4]))
forget_expired(ARGV[2])
forget_expired(EVERYONE)
return {'ok'}
