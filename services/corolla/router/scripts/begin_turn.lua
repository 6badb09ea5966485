-- Locks a session for a turn.
-- ARGV: session id, tenant, turn id, lock in ms, the greatest number of the tenant's stored bytes or 0, of everyone's or
-- 0, and the bytes that the turn may add.
-- A turn that already holds the lock gets it again. A turn of the same name takes the lock over; the name ends at the
-- first dot. The bounds of bytes do not apply to a turn that was written already, since it only reads the result.
local function name_of(turn_id) return string.match(turn_id, '^[^.]*') end
local record = owned(ARGV[1], ARGV[2])
if not record then return {'missing'} end
local holder = redis.call('GET', turn_key(ARGV[1]))
if holder and name_of(holder) ~= name_of(ARGV[3]) then return {'busy'} end
local new_bytes, written = tonumber(ARGV[7]), redis.call('HGET', session_key(ARGV[1]), 'written')
local is_over = written and name_of(written) == name_of(ARGV[3])
if holder ~= ARGV[3] and not is_over then
  local refusal = refusal_of_bytes(ARGV[2], new_bytes, tonumber(ARGV[5]), tonumber(ARGV[6]))
  if refusal then return refusal end
end
-- Only this script raises the epoch. So two turns never open a hop with the same epoch, even if the earlier one failed.
if holder ~= ARGV[3] then redis.call('HINCRBY', session_key(ARGV[1]), 'epoch', 1) end
redis.call('SET', turn_key(ARGV[1]), ARGV[3], 'PX', ARGV[4])
keep_at_least(ARGV[1], tonumber(ARGV[4]))
count_bytes(ARGV[1], ARGV[2], new_bytes)
return found(ARGV[1], record)
