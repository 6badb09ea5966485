-- ARGV: session id, tenant, turn id, lock in ms. A turn that already holds the lock gets it again.
local record = owned(ARGV[1], ARGV[2])
if not record then return {'missing'} end
local holder = redis.call('GET', turn_key(ARGV[1]))
if holder and holder ~= ARGV[3] then return {'busy'} end
-- Raised here and nowhere else, so that no two turns open a hop with the same epoch, whatever became of the earlier one.
if not holder then redis.call('HINCRBY', session_key(ARGV[1]), 'epoch', 1) end
redis.call('SET', turn_key(ARGV[1]), ARGV[3], 'PX', ARGV[4])
keep_at_least(ARGV[1], tonumber(ARGV[4]))
return found(ARGV[1], record)
