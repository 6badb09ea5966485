-- ARGV: session id, tenant, turn id, ttl in ms, epoch and store id of the turn, then record and chain unless the turn is
-- discarded.
local key = session_key(ARGV[1])
if owned(ARGV[1], ARGV[2]) then
  local holder = redis.call('GET', turn_key(ARGV[1]))
  if holder ~= ARGV[3] then
    -- The same call again is no error: the first answer may be lost.
    if redis.call('HGET', key, 'turn') == ARGV[3] then return {'ok'} end
    -- A lock that ran out, as while the store was frozen, does no harm unless another turn began: that raises the epoch.
    if holder or redis.call('HGET', key, 'epoch') ~= ARGV[5] then return {'lost'} end
  end
else
  -- A store that has lost its memory since the turn began knows no session; the turn does.
  local is_forgotten = redis.call('EXISTS', key) == 0 and ARGV[6] ~= '' and ARGV[6] ~= store_id()
  if not is_forgotten or not ARGV[7] then return {'missing'} end
  redis.call('HSET', key, 'tenant', ARGV[2], 'epoch', ARGV[5])
end
-- First, and freeing: so a full store lets running turns end.
redis.call('DEL', turn_key(ARGV[1]))
redis.call('HSET', key, 'turn', ARGV[3])
if ARGV[7] then redis.call('HSET', key, 'record', ARGV[7], 'chain', ARGV[8], 'written', ARGV[3]) end
keep(ARGV[1], tonumber(ARGV[4]))
forget_expired(ARGV[2])
return {'ok'}
