-- Marks the servers at a server's host as slower than they report. Returns 1 if they were not marked before.
-- ARGV: server id, ms.
local entry = redis.call('HGET', SERVERS, ARGV[1])
if not entry then return 0 end
local key = doubted_key(address_of(entry))
if not redis.call('SET', key, '1', 'PX', ARGV[2], 'NX') then return 0 end
local addresses = redis.call('HGETALL', ADDRESSES)
for index = 1, #addresses, 2 do
  if doubted_key(addresses[index]) == key then changed(addresses[index + 1]) end
end
return 1
