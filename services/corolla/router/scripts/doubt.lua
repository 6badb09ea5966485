-- Marks the servers at a server's host as slower than they report. Returns 1 if they were not marked before.
-- ARGV: server id, ms.
local entry = redis.call('HGET', SERVERS, ARGV[1])
if not entry then return 0 end
if not redis.call('SET', doubted_key(address_of(entry)), '1', 'PX', ARGV[2], 'NX') then return 0 end
changed(ARGV[1])
return 1
