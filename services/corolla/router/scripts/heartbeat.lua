-- Renews a lease with a new state and load. ARGV: server id, address or '', lease, lease in ms.
-- Returns 1; 0 when the server is not known; 2 when another one has its address.
listening_since(tonumber(ARGV[4]))
local holder = redis.call('HGET', ADDRESSES, ARGV[2])
if holder and holder ~= ARGV[1] then return 2 end
local before = redis.call('HGET', LEASES, ARGV[1])
if not before or redis.call('HEXISTS', SERVERS, ARGV[1]) == 0 then return 0 end
hear(ARGV[1], ARGV[3])
local was_suspected = redis.call('DEL', suspect_key(ARGV[1])) == 1
if was_suspected or string.sub(before, 1, 1) ~= string.sub(ARGV[3], 1, 1) then changed(ARGV[1]) end
return 1
