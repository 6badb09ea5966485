-- Renews a lease with a new state and load. Returns 1, or 0 when the lease is lost.
-- ARGV: server id, lease, lease in ms.
local before = redis.call('GET', lease_key(ARGV[1]))
if not before or redis.call('HEXISTS', SERVERS, ARGV[1]) == 0 then return 0 end
redis.call('SET', lease_key(ARGV[1]), ARGV[2], 'PX', ARGV[3])
local was_suspected = redis.call('DEL', suspect_key(ARGV[1])) == 1
if was_suspected or string.sub(before, 1, 1) ~= string.sub(ARGV[2], 1, 1) then changed(ARGV[1]) end
return 1
